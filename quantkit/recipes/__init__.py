"""Which layer gets what. Recipes are YAML files beside this one; README.md helps to choose."""
