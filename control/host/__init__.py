"""What a host needs before sandboxes can run on it: one network, one forwarder, firewall rules, a helper for volumes."""
