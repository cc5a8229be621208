// Tokens that clang's C++ parser would not take as they are.
#include "clang/Lex/Preprocessor.h"
#include "frontend.h"

using namespace clang;

namespace msl {
namespace {

class Tokens {
 public:
  Tokens(Preprocessor& preprocessor, LangOptions& options)
      : preprocessor_(preprocessor), options_(options) {}

  void operator()(const Token& read) {
    Token& token = const_cast<Token&>(read);
    kernelKeyword(token);
    threadgroupValue(token);
    instantiationAttributes(token);
    arrayParameter(token);
    methodQualifier(token);
    last_ = token;
  }

 private:
  void insert(std::initializer_list<Token> tokens) {
    auto copy = std::make_unique<Token[]>(tokens.size());
    std::copy(tokens.begin(), tokens.end(), copy.get());
    preprocessor_.EnterTokenStream(std::move(copy), tokens.size(), true, true);
  }

  static Token punctuation(Token like, tok::TokenKind kind) {
    like.setIdentifierInfo(nullptr);
    like.setKind(kind);
    like.setLength(1);
    return like;
  }

  void toAttribute(Token& token) {
    token.setKind(tok::kw___attribute);
    token.setIdentifierInfo(preprocessor_.getIdentifierInfo("__attribute__"));
  }

  // `kernel void f(...)` becomes `__attribute__((msl_kernel)) void f(...)`.
  void kernelKeyword(Token& token) {
    if (last_.isOneOf(tok::l_square, tok::l_paren, tok::comma))
      return;
    if (!token.is(tok::identifier) ||
        token.getIdentifierInfo() != preprocessor_.getIdentifierInfo("kernel"))
      return;
    Token open = punctuation(token, tok::l_paren), close = punctuation(token, tok::r_paren);
    Token name = token;
    name.setIdentifierInfo(preprocessor_.getIdentifierInfo("msl_kernel"));
    toAttribute(token);
    insert({open, open, name, close, close});
  }

  // `threadgroup float a[4] = {0};` becomes
  // `threadgroup float a[4] __attribute__((msl_initialised((0))));`: clang lets no variable in that
  // space have a value, and nothing could write it before the threads run.
  void threadgroupValue(Token& token) {
    if (braces_ >= 0) {
      bool ends = braces_ == 0 && token.isOneOf(tok::semi, tok::comma);
      Token close = punctuation(token, tok::r_paren);
      if (token.is(tok::l_brace)) {
        ++braces_;
        token.setKind(tok::l_paren);
        opened_ = true;
        return;
      }
      if (token.is(tok::r_brace)) {
        --braces_;
        if (opened_) {  // {}
          token.setKind(tok::numeric_constant);
          token.setLiteralData("0");
          insert({close});
        } else {
          token = close;
        }
      } else if (ends) {
        braces_ = -1;
        insert({close, close, token});
        token = close;
      }
      opened_ = false;
      return;
    }
    if (token.is(tok::kw___local))
      local_ = true;
    else if (token.isOneOf(tok::semi, tok::comma, tok::l_paren, tok::r_paren, tok::l_brace) ||
             token.isOneOf(tok::r_brace, tok::star, tok::amp))
      local_ = false;
    if (!local_ || !token.is(tok::equal))
      return;
    local_ = false;
    braces_ = 0;
    Token open = punctuation(token, tok::l_paren), name = token;
    name.setKind(tok::identifier);
    name.setIdentifierInfo(preprocessor_.getIdentifierInfo("msl_initialised"));
    toAttribute(token);
    insert({open, open, name, open});
  }

  // `template [[host_name("x")]] [[kernel]] ...`: an explicit instantiation takes GNU attributes
  // only, so [[a]] becomes __attribute__((a)) after `template`.
  void instantiationAttributes(Token& token) {
    switch (rewriting_) {
      case Outside:
        if (token.is(tok::kw_template))
          rewriting_ = AfterTemplate;
        break;
      case AfterTemplate:
        if (token.is(tok::l_square)) {
          toAttribute(token);
          rewriting_ = SecondOpen;
        } else if (!token.is(tok::kw_template)) {
          rewriting_ = Outside;
        }
        break;
      case SecondOpen:
        token.setKind(tok::l_paren);
        insert({punctuation(token, tok::l_paren)});
        rewriting_ = Inside;
        depth_ = 0;
        break;
      case Inside:
        if (token.is(tok::l_paren))
          ++depth_;
        if (token.is(tok::r_paren))
          --depth_;
        if (depth_ == 0 && token.is(tok::r_square)) {
          token.setKind(tok::r_paren);
          rewriting_ = SecondClose;
        }
        break;
      case SecondClose:
        token.setKind(tok::r_paren);
        rewriting_ = AfterTemplate;
        break;
    }
  }

  // `constant const int* a[2]` as a parameter: only OpenCL gives an array parameter a space.
  void arrayParameter(const Token& token) {
    if (token.isOneOf(tok::kw___global, tok::kw___local, tok::kw___constant))
      spaced_ = true;
    options_.OpenCL = spaced_ && after_bracket_ && token.isOneOf(tok::comma, tok::r_paren);
    if (token.isOneOf(tok::comma, tok::l_paren, tok::semi))
      spaced_ = false;
    after_bracket_ = token.is(tok::r_square) && !last_.is(tok::r_square);
  }

  // `f() const device`: clang reads a space after a parameter list only as OpenCL C++, so that mode
  // is on for just those tokens (elsewhere it would put temporaries into __private).
  void methodQualifier(const Token& token) {
    bool space = token.isOneOf(tok::kw___global, tok::kw___local, tok::kw___constant);
    bool qualifier = space || token.isOneOf(tok::kw_const, tok::kw_volatile, tok::kw_noexcept);
    if (space && after_parameters_) {
      open_ = true;
      since_ = 0;
      options_.OpenCLCPlusPlus = 1;
    } else if (open_ && !qualifier && ++since_ == 2) {
      open_ = false;
      options_.OpenCLCPlusPlus = 0;
    }
    after_parameters_ = token.is(tok::r_paren) || (after_parameters_ && qualifier);
  }

  Preprocessor& preprocessor_;
  LangOptions& options_;
  Token last_{};
  enum { Outside, AfterTemplate, SecondOpen, Inside, SecondClose } rewriting_ = Outside;
  int depth_ = 0, since_ = 0, braces_ = -1;  // braces_: open ones of a threadgroup variable's value
  bool local_ = false, opened_ = false;
  bool after_bracket_ = false, spaced_ = false, after_parameters_ = false, open_ = false;
};

}  // namespace

std::function<void(const Token&)> tokenWatcher(Preprocessor& preprocessor, LangOptions& options) {
  return Tokens(preprocessor, options);
}

}  // namespace msl
