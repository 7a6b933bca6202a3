from rooftile.cli import main

main()
