"""Documents to chunks, chunks to a database, a database to neighbours."""
