"""What acts: sockets, timers, names. Thin; every decision is asked of `gateway.core`."""
