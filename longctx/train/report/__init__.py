"""What people look at of a run: one of its rows, pages, pictures, measures of a long context."""
