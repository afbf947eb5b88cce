"""Pure decisions of control: what a session may become, who may start, what a container and a grant look like."""
