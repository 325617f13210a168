"""What people look at: progress, tables, pages and model cards."""
