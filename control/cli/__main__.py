"""Entry of `opificia`."""


def main() -> None:
    """Run the command line."""
    from control.cli.app import app

    app()


if __name__ == "__main__":
    main()
