"""placeholder"""
NAME="demo"
def command() -> None:
    """Placeholder."""
