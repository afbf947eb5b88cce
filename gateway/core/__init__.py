"""Pure decisions on bytes, times and addresses that are passed in. Nothing here does I/O, reads a clock or logs."""
