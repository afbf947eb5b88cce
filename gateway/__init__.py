"""The gateway: parses hostile bytes, judges egress, relays the model API. It must not know Docker, a database or `control`."""
