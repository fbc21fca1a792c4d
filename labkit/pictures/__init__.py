"""What pictures of a trace are made of: bars, their styles and scales, frames of the live one, sheets of the finished ones."""
