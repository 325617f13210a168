"""The demo: a small trained model that ships with growkit, its text, and its story."""
