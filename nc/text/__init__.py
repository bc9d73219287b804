"""Tables and wrapped lines for reports."""
