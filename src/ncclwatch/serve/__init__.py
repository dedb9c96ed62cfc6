"""The page for browsers: jobs that are watched or were recorded, over HTTP, read only."""
