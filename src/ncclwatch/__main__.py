"""``python -m ncclwatch``."""

from ncclwatch.cli.main import main

if __name__ == "__main__":
    main()
