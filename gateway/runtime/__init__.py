"""Small runtime helpers that both daemons share: settings from TOML, service notification, listen addresses."""
