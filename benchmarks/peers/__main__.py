"""Compare this package with other libraries on a CPU: the same program as ``python -m benchmarks.cpu``."""

from benchmarks.cpu import main

if __name__ == "__main__":
    main()
