"""The papers behind the models and trainers, as BibTeX."""

GOYAL_2021 = """@phdthesis{goyal2021characterizing,
  title = {Characterizing and Overcoming the Limitations of Neural Autoregressive Models},
  author = {Goyal, Kartik},
  school = {Carnegie Mellon University},
  year = {2021}
}"""
GOYAL_2022 = """@inproceedings{goyal2022exposing,
  title = {Exposing the Implicit Energy Networks behind Masked Language Models via {Metropolis--Hastings}},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {International Conference on Learning Representations},
  year = {2022}
}"""
GOYAL_2017 = """@inproceedings{goyal2017differentiable,
  title = {Differentiable Scheduled Sampling for Credit Assignment},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2017}
}"""
GOYAL_2019 = """@inproceedings{goyal2019empirical,
  title = {An Empirical Investigation of Global and Local Normalization for Recurrent Neural Sequence Models Using a
    Continuous Relaxation to Beam Search},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {Conference of the North American Chapter of the Association for Computational Linguistics},
  pages = {1724--1733},
  year = {2019}
}"""
WELLECK_2021 = """@inproceedings{welleck2021mle,
  title = {{MLE}-Guided Parameter Search for Task Loss Minimization in Neural Sequence Modeling},
  author = {Welleck, Sean and Cho, Kyunghyun},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year = {2021}
}"""
SHEN_2016 = """@inproceedings{shen2016minimum,
  title = {Minimum Risk Training for Neural Machine Translation},
  author = {Shen, Shiqi and Cheng, Yong and He, Zhongjun and He, Wei and Wu, Hua and Sun, Maosong and Liu, Yang},
  booktitle = {Annual Meeting of the Association for Computational Linguistics},
  year = {2016}
}"""
DENG_2020 = """@inproceedings{deng2020residual,
  title = {Residual Energy-Based Models for Text Generation},
  author = {Deng, Yuntian and Bakhtin, Anton and Ott, Myle and Szlam, Arthur and Ranzato, Marc'Aurelio},
  booktitle = {International Conference on Learning Representations},
  year = {2020}
}"""
