"""GEMMs of every kind: one folder, a mainloop for each regime, prologues and epilogues as parts."""
