"""Full pattern: a token sees itself and every earlier token."""
