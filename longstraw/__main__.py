"""`python -m longstraw`: the command, where its script is not on the path (under `torchrun -m`, for one)."""

from longstraw.cli import main

if __name__ == "__main__":
    main()
