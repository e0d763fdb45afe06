"""AdamWAdv: AdamW with AMSGrad."""
