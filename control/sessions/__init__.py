"""Acts on sessions: the journal, one task for each live session, the queue, and what happens after a restart."""
