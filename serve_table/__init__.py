"""The online half of Rutter: reads an artifact, decides, relays, journals.

Imports stay light: nothing from `learn` or `pipelines`, no pandas, scikit-learn, optuna or numba.
"""
