"""`python -m layerzero`: the same command as `lz`."""

from layerzero.cli import main

if __name__ == "__main__":
    main()
