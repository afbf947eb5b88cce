"""The runner protocol: its messages, control's end of it, and the reference runner that is mounted into sandboxes."""
