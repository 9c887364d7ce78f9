"""Show what is known of a run, as a table and as a page."""
