"""`python -m fenka`."""

from fenka.cli.main import main

main()
