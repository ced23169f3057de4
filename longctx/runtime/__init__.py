"""What a patched model carries: its options, store, graphs and the count of its steps."""
