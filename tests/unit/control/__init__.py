"""Pure decisions of control."""
