"""What tests and the demo share: servers to talk to, a private engine, a private host. No test lives here."""
