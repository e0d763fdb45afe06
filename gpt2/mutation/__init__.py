"""``make mutation-test``: faults planted in the product, of which ``make check`` must detect each."""
