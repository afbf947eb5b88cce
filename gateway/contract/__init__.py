"""The language between gateway and control: frozen, versioned msgspec structs. `control` imports this and nothing else of the gateway."""
