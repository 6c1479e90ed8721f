"""What a session is and where it stands. Pure data; nothing here does I/O of its own."""
