"""Whether runs at work are well: rules over what they record, and a screen that shows them."""
