"""Two trees, or two files of records, against each other."""
