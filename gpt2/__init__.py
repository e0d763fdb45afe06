"""Everything that knows what GPT-2 is: model, mechanisms, data, studies and the shared trainer."""
