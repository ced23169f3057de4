"""What people look at after a run: pages, pictures, measures of a long context."""
