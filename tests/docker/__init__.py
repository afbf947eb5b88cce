"""On a real engine: containers, volumes, network, firewall and images as they really behave."""
