"""``python -m flodl_hf``: the command line, where its script is not on the path."""

from flodl_hf.cli import main

if __name__ == "__main__":
    main()
