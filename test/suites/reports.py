"""What reports say, without the breaks of their lines."""


def said(report):
    """Return the text of a report, each run of spaces and line breaks as one space."""
    return " ".join(report.text(details=True).split())
