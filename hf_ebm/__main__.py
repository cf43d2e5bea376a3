"""`python -m hf_ebm` is the command `hf-ebm`."""

from hf_ebm.cli.main import main

if __name__ == "__main__":
    main()
