"""Every pure function that runs for each connection, request or event, by itself, with inputs as clients send them."""
