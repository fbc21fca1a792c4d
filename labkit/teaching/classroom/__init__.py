"""A class: `python -m labkit grade` judges submissions. Nothing else of labkit imports this package."""
