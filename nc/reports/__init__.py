"""What a report says of a model, and its printers: text, page, pictures, card."""
