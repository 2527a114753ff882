"""A bench for inventors: is a method sound, is it exact, and how does it compare?"""
