"""`python -m headrace` is `headrace`."""

from headrace.cli.app import main

if __name__ == "__main__":
    main(prog_name="headrace")
