import typer

from rooftile.bench.docs import main

typer.run(main)
