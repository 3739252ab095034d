"""What a request and its output are: immutable values, no wire format, no behaviour beyond arithmetic."""
