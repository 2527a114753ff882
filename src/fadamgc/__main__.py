"""``python -m fadamgc`` is the command ``fadamgc``."""

from fadamgc.cli.main import main

if __name__ == "__main__":
    main()
