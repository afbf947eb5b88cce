"""The operator's command line, `opificia`. Heavy modules are imported by the commands that use them: it starts at once."""
