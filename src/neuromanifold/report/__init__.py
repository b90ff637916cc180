"""Tables and pictures.

A plot function draws data that another function makes, so that what a picture says is tested without the picture.
"""
