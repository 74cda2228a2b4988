"""``python -m flodl_hf.cli``: the command line where the script is not on the path, as under torchrun."""

from flodl_hf.cli import main

if __name__ == "__main__":
    main()
